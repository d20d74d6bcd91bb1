"""Options from flags and variables: what wins, what is refused, and that a refusal names what is wrong."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from services.local.config import UpConfig
from services.router.config import RouterConfig
from shared.base.errors import ConfigError
from shared.options.config import option, parse_config, size_bytes, to_environ
from shared.options.peers import PeerConfig
from shared.options.worker import WorkerConfig


@dataclass(frozen=True, slots=True)
class Options:
    """Some options."""

    name: str = option("", "a name")
    color: str = option("red", "a color", choices=("red", "green"))
    num_items: int = option(3, "a count")
    limit: int | None = option(None, "a limit")
    timeout_s: float = option(1.5, "a time, 100% of it")
    memory: int | None = option(None, "a size", parse=size_bytes)
    eager: bool = option(True, "a switch")
    token: str = option("", "a secret", secret=True)
    derived: str = "not an option"

    def __post_init__(self) -> None:
        if self.num_items > 100:
            raise ValueError(f"--num-items is {self.num_items}; it must be at most 100")


def parse(*argv: str, **environ: str) -> Options:
    return parse_config(Options, argv, "prog", environ)


def test_without_flags_and_variables_all_options_have_their_defaults():
    assert parse() == Options()


EVERY_OPTION = Options("x", "green", 4, 7, 0.25, 2 * 1024**3, False, "t")


def test_flags_of_every_type_are_read():
    texts = ("--name", "x", "--color", "green", "--num-items", "4", "--limit", "7", "--timeout-s", "0.25", "--memory", "2GiB")
    assert parse(*texts, "--no-eager", "--token", "t") == EVERY_OPTION


def test_variables_of_every_type_are_read():
    texts = {"NAME": "x", "COLOR": "green", "NUM_ITEMS": "4", "LIMIT": "7", "TIMEOUT_S": "0.25", "MEMORY": "2GiB"}
    environ = {f"TWOSTROKE_{name}": text for name, text in {**texts, "EAGER": "off", "TOKEN": "t"}.items()}
    assert parse(**environ) == EVERY_OPTION


def test_a_flag_wins_over_its_variable():
    assert parse("--num-items", "5", "--eager", TWOSTROKE_NUM_ITEMS="6", TWOSTROKE_EAGER="false") == Options(num_items=5)


def test_a_flag_hides_even_an_unreadable_variable():
    assert parse("--num-items", "5", TWOSTROKE_NUM_ITEMS="many").num_items == 5


def test_an_empty_variable_counts_as_unset():
    assert parse(TWOSTROKE_NUM_ITEMS="").num_items == 3


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (("--num-items", "many"), {}, ["--num-items", "'many'", "whole number"]),
        ((), {"TWOSTROKE_NUM_ITEMS": "1.5"}, ["TWOSTROKE_NUM_ITEMS", "'1.5'", "whole number"]),
        ((), {"TWOSTROKE_TIMEOUT_S": "soon"}, ["TWOSTROKE_TIMEOUT_S", "'soon'", "a number"]),
        (("--color", "blue"), {}, ["--color", "'blue'", "red, green"]),
        ((), {"TWOSTROKE_COLOR": "blue"}, ["TWOSTROKE_COLOR", "'blue'", "red, green"]),
        ((), {"TWOSTROKE_EAGER": "maybe"}, ["TWOSTROKE_EAGER", "'maybe'", "true or false"]),
        (("--memory", "4 bananas"), {}, ["--memory", "'4 bananas'", "4GiB"]),
        (("--num-items", "101"), {}, ["--num-items", "101", "at most 100"]),
        (("--num-item", "4"), {}, ["--num-item"]),  # no abbreviations: a new option must not change what an old one means
        (("--derived", "x"), {}, ["--derived"]),
        (("stray",), {}, ["stray"]),
    ],
)
def test_a_mistake_is_refused_in_one_line_that_names_it(argv, environ, words):
    with pytest.raises(ConfigError) as caught:
        parse(*argv, **environ)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "size"),
    [("1073741824", 1 << 30), ("4GiB", 4 << 30), ("512M", 512 << 20), ("1.5kb", 1536), ("2 TiB", 2 << 40), ("0", 0)],
)
def test_sizes_are_read_in_powers_of_1024(text, size):
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "4GG", "1e9"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        size_bytes(text)


def test_help_names_every_flag_and_its_default_but_no_secret(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--num-items" in shown
    assert "(default: 3)" in shown
    assert "100% of it" in shown
    assert "derived" not in shown


def test_variables_hand_an_instance_on_whole():
    assert parse(**to_environ(EVERY_OPTION)) == EVERY_OPTION


def test_only_what_differs_from_the_default_is_handed_on():
    assert to_environ(Options(num_items=9)) == {"TWOSTROKE_NUM_ITEMS": "9"}


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-num-seqs", "0"],
        ["--block-size", "12"],
        ["--gpu-memory-utilization", "1.5"],
        ["--gpu-memory-utilization", "0"],
        ["--port", "65536"],
        ["--port", "-1"],
        ["--metrics-port", "65536"],
        ["--host", ""],
        ["--host", "[::1]"],
        ["--advertise", "worker-1"],
        ["--advertise", "0.0.0.0:7001"],
        ["--advertise", "[::]:7001"],
        ["--num-blocks", "0"],
        ["--num-threads", "0"],
        ["--max-model-len", "0"],
        ["--max-num-batched-tokens", "0"],
        ["--transfer-timeout-s", "0"],
        ["--drain-timeout-s", "-1"],
        ["--cluster-secret", "15 characters.."],
        ["--cluster-secret", "letters of a h\u00f6her order"],
        ["--cluster-secret-file", "f", "--cluster-secret", "sixteen letters!"],
    ],
)
def test_worker_options_out_of_range_are_refused_by_name(argv):
    with pytest.raises(ConfigError, match=argv[0]) as refused:
        parse_config(WorkerConfig, argv, "prog", {})
    assert "letters" not in str(refused.value)


@pytest.mark.parametrize(
    "argv",
    [
        *(["--port", "65535"], ["--port", "1"], ["--host", "::1"], ["--host", "0.0.0.0"], ["--advertise", "[2001:db8::7]:1"]),
        *(["--num-threads", "1"], ["--gpu-memory-utilization", "1"], ["--block-size", "8"], ["--drain-timeout-s", "0"]),
        ["--cluster-secret", "sixteen letters!"],
    ],
)
def test_worker_options_at_the_edge_of_their_range_are_taken(argv):
    assert parse_config(WorkerConfig, argv, "prog", {}) != WorkerConfig()


TLS = {"--tls-cert": "c", "--tls-key": "k", "--tls-ca": "a"}


@pytest.mark.parametrize("options", [WorkerConfig, RouterConfig])
@pytest.mark.parametrize("given", [names for n in (1, 2) for names in itertools.combinations(TLS, n)], ids="+".join)
def test_tls_by_half_is_refused_and_what_is_missing_is_named(options, given):
    with pytest.raises(ConfigError, match="go together") as refused:
        parse_config(options, [word for flag in given for word in (flag, TLS[flag])], "prog", {})
    missing = str(refused.value).partition("; ")[2]
    assert {flag for flag in TLS if flag in missing} == TLS.keys() - set(given)


@pytest.mark.parametrize("options", [WorkerConfig, RouterConfig])
def test_whole_tls_is_taken(options):
    config = parse_config(options, [word for pair in TLS.items() for word in pair], "prog", {})
    assert (config.tls_cert, config.tls_key, config.tls_ca) == ("c", "k", "a")


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "65536"],
        ["--host", "a b"],
        ["--ssl-certfile", "c"],
        ["--ssl-keyfile", "k"],
        ["--request-timeout-s", "0"],
        ["--max-concurrent-requests", "0"],
        ["--max-request-bytes", "0"],
    ],
)
def test_router_options_out_of_range_are_refused_by_name(argv):
    with pytest.raises(ConfigError, match=argv[0]):
        parse_config(RouterConfig, argv, "prog", {})


def test_secrets_are_not_in_what_python_shows_of_options():
    config = up("--api-key", "sesame", "--redis-url", "redis://:sesame@h", TWOSTROKE_CLUSTER_SECRET="sesame" * 9)
    assert config.api_key == "sesame"
    assert "sesame" not in repr(config)
    assert "api_key" not in repr(config)


@pytest.mark.parametrize(
    ("model", "served_model_name", "name"),
    [("/models/m", "", "m"), ("/models/m/", "", "m"), ("org/m", "", "m"), ("m", "", "m"), ("/models/m", "n", "n")],
)
def test_a_model_is_served_under_the_last_part_of_its_path_or_the_name_it_is_given(model, served_model_name, name):
    assert WorkerConfig(model=model, served_model_name=served_model_name).model_name == name
    assert RouterConfig(model=model, served_model_name=served_model_name).model_name == name


@pytest.mark.parametrize(("model", "name"), [("/", ""), ("m", "a\nb"), ("m", "x" * 257)])
@pytest.mark.parametrize("config", [WorkerConfig, RouterConfig])
def test_names_of_models_that_no_registry_takes_are_refused(config, model, name):
    with pytest.raises(ValueError, match="--served-model-name"):
        config(model=model, served_model_name=name)
    assert len(config(model="m", served_model_name="x" * 256).model_name) == 256


def up(*argv: str, **environ: str) -> UpConfig:
    return parse_config(UpConfig, argv, "twostroke up", environ)


@pytest.mark.parametrize(
    ("argv", "counts"),
    [
        ([], (1, 1, 0)),
        (["--prefill", "2", "--decode", "3"], (2, 3, 0)),
        (["--colocated", "2"], (0, 0, 2)),
        (["--prefill", "0"], (0, 1, 0)),
        (["--colocated", "1", "--prefill", "1", "--decode", "1"], (1, 1, 1)),
    ],
)
def test_up_counts_its_workers(argv, counts):
    config = up(*argv)
    assert (config.num_prefill, config.num_decode, config.colocated) == counts
    assert config.num_workers == sum(counts)


@pytest.mark.parametrize("argv", [["--decode", "0"], ["--decode", "-1"], ["--colocated", "-1"]])
def test_up_refuses_counts_with_which_nobody_generates(argv):
    with pytest.raises(ConfigError, match=argv[0]):
        up(*argv)


def test_up_hands_every_worker_flag_on():
    config = up("--dtype", "float32", "--max-num-seqs", "4", "--port", "9000", "--host", "0.0.0.0", TWOSTROKE_BLOCK_SIZE="32")
    worker = config.worker(worker_id="decode-0", redis_url="unix:///x")
    again = parse_config(WorkerConfig, [], "prog", to_environ(worker))
    assert again == worker
    assert (again.dtype, again.max_num_seqs, again.block_size) == ("float32", 4, 32)
    assert (again.host, again.port) == ("127.0.0.1", 0)  # the HTTP address is the router's


@pytest.mark.parametrize("name", ["", "a b", "a:b", "ä", "x" * 65, "a\n"])
def test_namespace_that_could_be_mistaken_in_a_key_is_refused(name):
    with pytest.raises(ConfigError, match="--namespace"):
        parse_config(WorkerConfig, ["--namespace", name], "worker", {})


def test_namespace_goes_from_the_supervisor_to_every_child():
    assert UpConfig(namespace="blue-2.x_y").worker().namespace == "blue-2.x_y"
    assert to_environ(PeerConfig(namespace="blue")) == {"TWOSTROKE_NAMESPACE": "blue"}
    assert PeerConfig().namespace == "default"
