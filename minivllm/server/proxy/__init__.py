"""One address in front of prefill and decode servers, which sends every prompt to one of each.

May import: device, executor.records, server, server.answers, server.bodies, server.limits.
Door: `run_proxy` in proxy_run.py.
"""
