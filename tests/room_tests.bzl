"""One bazel test for each test file of a folder, run by pytest."""

def room_tests(deps = (), data = (), room = None):
    """Defines `helpers` from all files of the folder, and a test for each test_*.py.

    Every test may import the room of the package that the folder is named for, and what it knows.

    Args:
      deps: labels of what the tests import beyond that, such as the helpers of another folder.
      data: labels of other files they read.
      room: label of the room, if the folder is not named for it.
    """
    folder = native.package_name()
    tests = native.glob(["**/test_*.py"])
    native.py_library(
        name = "helpers",
        srcs = native.glob(["**/*.py"]),
        visibility = ["//visibility:public"],
        deps = ["//tests:helpers"] if folder != "tests" else [],
    )
    for file in tests:
        native.py_test(
            name = file[:-len(".py")].replace("/", "_"),
            srcs = [file, "//tests:pytest_main.py"],
            args = ["$(location %s)" % file],
            data = ["//:pyproject.toml"] + list(data),
            main = "//tests:pytest_main.py",
            timeout = "long",
            deps = [":helpers", room or "//lingvo_gshard" + folder[len("tests"):]] + list(deps),
        )
