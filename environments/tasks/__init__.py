"""The package has questions with reference answers, and the base class of environments that ask them.

In reading order: `arithmetic` (generated problems), `data` (questions from files or a data set), `chat_dataset` (chats
from the same sources, as rows and as token ids), `question_env` (the base class). `arithmetic`, `data` and
`chat_dataset` import nothing of `sdk`; `question_env` may import `sdk` and `rewards`.
"""
