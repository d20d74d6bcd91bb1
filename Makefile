# Two commands do everything: `make up` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: proto
proto:  ## regenerate shared/rpc from proto/
	$(BIN)/python -m grpc_tools.protoc -I shared/rpc=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/*.proto
