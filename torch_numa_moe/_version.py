"""The one place that says the version; the build puts it into the extension too."""

__version__ = "0.1.0"
