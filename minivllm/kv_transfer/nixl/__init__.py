"""Blocks that one engine reads out of another's memory by itself, through NIXL, under leases.

May import: config, kv_transfer, kv_transfer.connectors, kv_transfer.lookup, models.
Door: `NixlConnector` in nixl_connector.py.
"""
