"""Parts of answers: messages, constraints, logprobs, streams of events.

May import: processing, server.bodies, server.parsers, server.protocol, tokenizer.
"""
