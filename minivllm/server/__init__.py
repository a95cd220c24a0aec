"""The OpenAI-compatible HTTP server: what comes over the wire, turned into requests of an asynchronous engine."""
