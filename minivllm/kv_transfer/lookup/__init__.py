"""Blocks go from one engine to another over sockets:
pipes, a buffer of blocks that wait, and their connector.

Annex: plugs in at CONNECTORS.
May import: config, distributed, kv_transfer, kv_transfer.connectors.
Door: `LookupBufferConnector` in lookup_connector.py.
"""
