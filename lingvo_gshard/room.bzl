"""A room of the package: all its files as one library."""

def room(knows = (), data = ()):
    """Defines a room's library under the room's name.

    Args:
      knows: names of the rooms it may import, the nearest ones; what they know comes with them.
      data: labels of files it reads at run time.
    """
    native.py_library(
        name = native.package_name().split("/")[-1],
        srcs = native.glob(["**/*.py"]),
        data = list(data) + native.glob(["**/__init__.pyi"], allow_empty = True),
        visibility = ["//visibility:public"],
        deps = ["//lingvo_gshard:init"] + ["//lingvo_gshard/" + name for name in knows],
    )
