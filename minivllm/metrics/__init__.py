"""What a server counts, times and traces: Prometheus metrics, a dashboard, a console line, OpenTelemetry.

May import: processing.
Door: `ServerMetrics` in prometheus.py.
"""
