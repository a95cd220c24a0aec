"""One module per endpoint: a checked body comes in, an answer or a stream goes out.

May import: processing, server.answers, server.parsers, server.protocol, server.service, server.wire.
"""
