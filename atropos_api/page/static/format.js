// Numbers and times as people read them.

/** A number with about three digits that matter: 0.0123, 4.56, 12,300. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return trimmed(value.toFixed(1));
  if (size >= 0.001 || size === 0) return trimmed(value.toPrecision(3));
  return value.toExponential(1);
}

function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** A whole number with commas. */
export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

/** A duration: 0.4 s, 12 s, 3 min, 2.1 h. */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${trimmed(Math.max(0, seconds).toFixed(1))} s`;
  if (seconds < 180) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${trimmed((seconds / 3600).toFixed(1))} h`;
}

/** A rate per second, as per minute or hour where that reads better. */
export function rate(perSecond, unit) {
  if (perSecond === null || perSecond === undefined) return `– ${unit}`;
  if (perSecond === 0) return `0 ${unit}`;
  if (perSecond >= 0.5) return `${number(perSecond)} ${unit}/s`;
  if (perSecond >= 0.5 / 60) return `${number(60 * perSecond)} ${unit}/min`;
  return `${number(3600 * perSecond)} ${unit}/h`;
}

/** The time of day of a Unix time, with the date if it was another day. */
export function clock(time) {
  const at = new Date(1000 * time);
  const today = at.toDateString() === new Date().toDateString();
  const hours = at.toLocaleTimeString("en-GB");
  return today ? hours : `${at.toLocaleDateString("sv")} ${hours}`;
}

/** Bytes in units of 1024. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${number(value)} ${units[power]}`;
}
