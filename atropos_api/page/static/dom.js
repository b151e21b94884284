// Elements from plain values: text is set as text, never as markup, and characters that hide or turn text around are
// shown as symbols.

/** Make an element; children are nodes, texts or nothing. An attribute that is null or false is left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

/** Append children, however nested; null and undefined are skipped. */
export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** Replace all children of an element; a link or a table that is there again stays focused, and scrolled, as it was. */
export function fill(element, ...children) {
  const places = () => [...element.querySelectorAll("a, .scroll")];
  const held = (one) => one.scrollLeft || one === document.activeElement;
  const before = new Map(places().filter(held).map((one) => [nameOf(one), [one.scrollLeft, one === document.activeElement]]));
  element.replaceChildren();
  add(element, children);
  for (const one of before.size ? places() : []) {
    const [left, focused] = before.get(nameOf(one)) || [0, false];
    one.scrollLeft = left;
    if (focused) one.focus({ preventScroll: true });
  }
  return element;
}

function nameOf(element) {
  return element.getAttribute("href") || element.getAttribute("aria-label");
}

/** Replace the children only if the text differs, so that a screen reader is not interrupted for nothing. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

/** Return text in which each control, bidirectional and zero-width character is a visible symbol. */
export function visible(text) {
  return String(text).replace(HIDDEN, symbolOf);
}

function symbolOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `⟦U+${code.toString(16).toUpperCase().padStart(4, "0")}⟧`;
}

/** A value as JSON, with such characters as its escapes: text that is selected and copied is the same value. */
export function json(value) {
  const escaped = (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(value, null, 1).replace(HIDDEN, (character) => character.split("").map(escaped).join(""));
}

/** Tell a screen reader something, without moving the focus. */
export function announce(text) {
  const element = document.getElementById("announcer");
  if (element) setText(element, text);
}

/** Copy text to the clipboard; return false where the browser does not allow it, as over plain HTTP from elsewhere. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** A text to copy: the text itself, selectable, and a button where copying works. */
export function copyable(text, label) {
  const state = h("span", { class: "note", role: "status" });
  const code = h("pre", { class: "copyable", tabindex: "0", "aria-label": label }, visible(text));
  const button = h("button", { type: "button", onclick: async () => setText(state, (await copy(text)) ? "copied" : "select the text and copy it") }, "Copy");
  return h("div", { class: "copybox" }, code, button, state);
}

/** A table with a caption; rows are arrays of nodes or texts, and the first cell of each is its header. */
export function table(caption, titles, rows, { numeric = [] } = {}) {
  const cell = (tag, value, index, extra = {}) => h(tag, { class: numeric.includes(index) ? "number" : null, ...extra }, value);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, titles.map((title, index) => cell("th", title, index, { scope: "col" })))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, index) => (index ? cell("td", value, index) : cell("th", value, index, { scope: "row" }))))))));
}
