"""Parts of answers: messages, constraints, logprobs, streams of events.

May import: processing, server.parsers, server.protocol, server.wire, tokenizer.
"""
