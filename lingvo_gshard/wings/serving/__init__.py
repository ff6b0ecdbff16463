"""Serving: answers HTTP requests with one trained model.

The web framework's event loop never computes with the model. It submits requests to the engine,
whose threads pass events back to it.
"""
