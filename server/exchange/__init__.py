"""One exchange over HTTP: the request's id and body, the answer's stream, and what the server holds for all of them."""
