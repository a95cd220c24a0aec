"""One address in front of prefill and decode servers, which sends every prompt to one of each.

May import: device, executor.wire, server, server.answers, server.limits, server.wire.
Door: `run_proxy` in proxy_run.py.
"""
