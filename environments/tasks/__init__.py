"""The package has questions with reference answers, and the base class of environments that ask them.

In reading order: `arithmetic` (generated problems), `records` (records of files and data sets), `data` (questions from
them), `chat_messages` (the messages of a chat), `chat_dataset` (chats, as rows and as token ids), `question_env` (the
base class). Only `question_env` may import `sdk` and `rewards`.
"""
