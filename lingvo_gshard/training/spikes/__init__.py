"""Spikes of loss and gradient norm: how they are found, told, and answered by a roll back."""
