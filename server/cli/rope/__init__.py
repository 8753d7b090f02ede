"""`windlass rope`: what a rotary scaling does, in numbers and pictures."""
