"""Local updates over a mesh: workers that train alone and synchronize from time to time."""
