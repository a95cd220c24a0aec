"""The page for browsers: its HTML, style and scripts, and the endpoints that it watches the engine with.

May import: server.bodies, server.service.
Door: `add_page` in page.py.
"""
