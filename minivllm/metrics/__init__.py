"""What is counted and timed: Prometheus metrics, a dashboard for them, a line for the console."""
