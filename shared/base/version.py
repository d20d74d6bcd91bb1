"""The version of this project: read by packaging, the command line and the HTTP API."""

VERSION = "0.1.0"
