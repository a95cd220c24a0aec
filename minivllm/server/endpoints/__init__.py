"""One module per endpoint: a checked body comes in, an answer or a stream goes out.

May import: frontend, multimodal.files, processing, server.answers, server.bodies, server.protocol,
server.service.
"""
