"""Five programs, one for each thing that the language does:
chain, choice, branches, structure, an agent with tools.

May import: lang.
"""
