"""What a terminal shows: text that cannot harm it, Markdown, answers while they are written.

May import: server.parsers.
Door: `AnswerView` in answer_view.py.
"""
