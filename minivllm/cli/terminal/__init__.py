"""Output to a terminal: harmless text, Markdown, answers while they are written.

May import: server.parsers.
Door: `AnswerView` in answer_view.py.
"""
