"""Tokenizing, detokenizing and chat templates in processes that can be killed, and what the routes ask of them."""
