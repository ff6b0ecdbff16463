"""One bazel test for each test file of a folder, run by pytest."""

def room_tests():
    """Defines `helpers` from all files of the folder, and a test for each test_*.py.

    Every test may import the whole package and the helpers of all folders, and read the tree. That
    rooms of the package import no others than they declare is for tests/test_architecture.py.
    """
    tests = native.glob(["**/test_*.py"])
    native.py_library(
        name = "helpers",
        srcs = native.glob(["**/*.py"]),
        data = native.glob(
            ["**/*"],
            exclude = ["**/*.py", "**/BUILD", "**/__pycache__/**"],
        ),
        visibility = ["//visibility:public"],
    )
    for file in tests:
        native.py_test(
            name = file[:-len(".py")].replace("/", "_"),
            srcs = [file, "//tests:pytest_main.py"],
            args = ["$(location %s)" % file],
            data = ["//:tree"],
            main = "//tests:pytest_main.py",
            timeout = "long",
            deps = ["//tests:everything"],
        )
