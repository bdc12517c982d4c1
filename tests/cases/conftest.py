"""Where pytest-xdist is missing, its marker still has a meaning: the tests that share runs."""


def pytest_configure(config):
    config.addinivalue_line("markers", "xdist_group(name): with --dist loadgroup, one worker")
