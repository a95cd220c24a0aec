"""One address for prefill and decode servers: every prompt goes to one of each.

May import: device, executor.wire, server, server.answers, server.limits, server.wire.
Door: `run_proxy` in proxy_run.py.
"""
