"""`windlass top`: what a running server does, live: figures from its metrics, a view of them, and the loop that asks for them."""
