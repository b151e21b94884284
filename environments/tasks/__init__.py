"""The package has questions with reference answers, and the base class of environments that ask them.

In reading order: `arithmetic` (generated problems), `data` (questions from files or a data set), `question_env`
(the base class). `arithmetic` and `data` import nothing of `sdk`; `question_env` may import `sdk` and `rewards`.
"""
