"""One bazel test for each folder of tests, run by pytest."""

def room_tests():
    """Defines `helpers` from all files of the folder, and a test of each folder's test_*.py.

    One process runs the tests of a folder, since TensorFlow and jax take seconds to import. Every
    test may import the whole package and the helpers of all folders, and read the tree. That rooms
    of the package import no others than they declare is for tests/test_architecture.py.
    """
    folders = {}
    for file in native.glob(["**/test_*.py"]):
        folders.setdefault(file.rpartition("/")[0], []).append(file)
    native.py_library(
        name = "helpers",
        srcs = native.glob(["**/*.py"]),
        data = native.glob(
            ["**/*"],
            exclude = ["**/*.py", "**/BUILD", "**/__pycache__/**"],
        ),
        visibility = ["//visibility:public"],
    )
    for folder, files in folders.items():
        native.py_test(
            # A target that had the folder's name would take its place among the test's files.
            name = folder.replace("/", "_") + "_tests" if folder else "tests",
            srcs = files + ["//tests:pytest_main.py"],
            args = ["$(location %s)" % file for file in files],
            data = ["//:tree"],
            main = "//tests:pytest_main.py",
            timeout = "eternal",
            deps = ["//tests:everything"],
        )
