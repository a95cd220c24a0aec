"""The wire format: bodies that clients send (strict, nothing unknown) and the answers (typed dictionaries).

May import: server.bodies.
"""
