"""A local page that plans training on machines: its server, its jobs, and the page itself."""
