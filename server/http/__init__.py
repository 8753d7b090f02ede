"""HTTP server: listening sockets, TLS, the HTTP/1.1 protocol and the limits of connections."""
