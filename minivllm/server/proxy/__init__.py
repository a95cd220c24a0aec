"""One address for prefill and decode servers: every prompt goes to one of each.

May import: device, executor.records, server, server.answers, server.bodies, server.limits, server.service.
Door: `run_proxy` in proxy_run.py.
"""
