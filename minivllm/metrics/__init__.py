"""Metrics and traces of a server: Prometheus, a dashboard, a console line, OpenTelemetry.

May import: processing.
Door: `ServerMetrics` in prometheus.py.
"""
