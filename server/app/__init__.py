"""The application: its routes behind the middleware that asks for keys and bounds headers and bodies."""
