"""Blocks go from one engine to another over sockets: pipes, a buffer of blocks that wait, and their connector.

May import: config, kv_transfer, kv_transfer.connectors.
Door: `LookupBufferConnector` in lookup_connector.py.
"""
