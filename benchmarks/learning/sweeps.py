"""Which runs `benchmarks.convergence` makes, with the hyper-parameters of each mode."""

from __future__ import annotations

from dataclasses import dataclass, replace

STEPS_BETWEEN_PULLS = (1, 2, 4, 5, 8, 16, 32)
LOCALS = {
    "mirror": "local='mirror', mirror='exact'",
    "mirror kept": "local='mirror', mirror='kept'",
    "glu": "local='glu'",
    "secant": "local='secant'",
    "sgd": "local='sgd'",
}
WARMUP = 50  # Steps.
TUNED = ", lr_scale=1.4, beta=0.8"  # The best that was found for it with this momentum.
LIFTED = ", lr_scale=1.4, beta=0.7, local_warmup=100"
WARMUP_FULL = 100  # Of runs of two epochs: about the same share of the run.
LR, MOMENTUM = 0.05, 0.9
LR_ADAM = 1e-3
NUM_WORKERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run, but for its seed."""

    name: str
    mode: str  # As `mode=` takes it.
    lr: float = LR
    momentum: float = MOMENTUM
    optimizer: str = "sgd"
    compression: str = "none"
    pull_compression: str = "none"
    min_nbytes: int = 1 << 10  # Smaller tensors are not compressed. Models are small here.
    num_workers: int = NUM_WORKERS
    longer: float = 1.0  # Factor on the number of steps.
    k: int = 0


def ssgd(**changes: object) -> Setting:
    """Returns what everything is compared with."""
    return replace(Setting(name="ssgd", mode="ssgd"), **changes)  # type: ignore[arg-type]


def ssd(local: str, k: int, warmup: int = WARMUP, more: str = "", **changes: object) -> Setting:
    """Returns a run of `ssd` with one local update."""
    mode = f"ssd(steps={k}, warmup={warmup}, {LOCALS[local]}{more})"
    setting = Setting(name=f"{local} k={k}", mode=mode, k=k)
    return replace(setting, **changes)  # type: ignore[arg-type]


def quick() -> list[Setting]:
    """Returns what `--quick` runs: the delay modes at k 1, 5 and 16."""
    settings = [ssgd(), Setting(name="od", mode=f"od(warmup={WARMUP})")]
    return settings + [ssd(local, k) for local in LOCALS for k in (1, 5, 16)]


def by_k() -> list[Setting]:
    """Returns every local update at every k, the most important first."""
    first = [ssd(local, k) for k in (5, 1, 16, 32) for local in LOCALS]
    rest = [ssd(local, k) for k in (8, 2, 4) for local in LOCALS]
    return [ssgd(), *first, *rest]


def modes(warmup: int = WARMUP) -> list[Setting]:
    """Returns the other modes.

    An asynchronous mode makes N updates in the time of one synchronous step, so each has 1/N of the
    learning rate; `asgd m=0.6` also lowers the momentum, as `psworker demo` does.
    """
    share = {"lr": LR / NUM_WORKERS}
    settings = [
        Setting(name="ssgd backup=1", mode="ssgd(backup=1)"),
        Setting(name="asgd", mode="asgd", lr=LR / NUM_WORKERS),
        Setting(name="asgd m=0.6", mode="asgd", lr=LR / NUM_WORKERS, momentum=0.6),
        Setting(name="staleness n=1", mode="staleness(splits=1)"),
        Setting(name="staleness n=1 m=0.6", mode="staleness(splits=1)", momentum=0.6),
        Setting(name="staleness n=4", mode="staleness(splits=4)", lr=LR, momentum=0.6),
        Setting(name="dcasgd", mode="dcasgd", lr=LR / NUM_WORKERS),
        Setting(name="dcasgd adaptive", mode="dcasgd(adaptive=True, decay=0.95)", **share),
        Setting(name="ssp s=3", mode="ssp(bound=3)", lr=LR / NUM_WORKERS),
        Setting(name="od dc", mode=f"od(warmup={warmup})"),
        Setting(name="od mirror", mode=f"od(warmup={warmup}, local='mirror')"),
        Setting(name="od none", mode=f"od(warmup={warmup}, local='none')"),
        Setting(name="cd k=5, 2-bit", mode=f"cd(warmup={warmup})", compression="2bit"),
        Setting(
            name="cd mirror, 2-bit", mode=f"cd(warmup={warmup}, local='mirror')", compression="2bit"
        ),
        Setting(name="local H=8", mode=f"local(steps=8, warmup={warmup})"),
        Setting(name="slowmo H=8", mode=f"slowmo(steps=8, warmup={warmup})"),
        Setting(name="diloco H=16", mode=f"diloco(steps=16, warmup={warmup})"),
        Setting(name="delayed_nesterov H=16", mode="delayed_nesterov(steps=16)"),
        Setting(
            name="delayed_nesterov H=16 m=0.5",
            mode="delayed_nesterov(steps=16, outer_momentum=0.5)",
        ),
    ]
    return [ssgd(), *settings]


def full() -> list[Setting]:
    """Returns every mode, and every local update at every k: the table that needs several seeds."""
    sweep = [ssd(local, k, WARMUP_FULL) for local in LOCALS for k in STEPS_BETWEEN_PULLS]
    tuned = [
        ssd("secant", k, WARMUP_FULL, TUNED, name=f"secant k={k}, lr_scale=1.4, beta=0.8")
        for k in (5, 8, 16)
    ]
    return [*modes(WARMUP_FULL), *sweep, *tuned]


def tuned_secant() -> list[Setting]:
    """Returns the secant with other rates and factors, where it begins to fail and beyond."""
    choices = (
        (5, "lr_scale=0.5", ", lr_scale=0.5"),
        (5, "lr_scale=1.4", ", lr_scale=1.4"),
        (5, "alpha=1, beta=0.5", ", alpha=1.0, beta=0.5"),
        (5, "alpha=2, beta=0.8", ", alpha=2.0, beta=0.8"),
        (5, "alpha=0.25, beta=1", ", alpha=0.25, beta=1.0"),
        (5, "alpha=1, beta=1", ", alpha=1.0, beta=1.0"),
        (5, "alpha=4, beta=0.5", ", alpha=4.0, beta=0.5"),
        (5, "local_warmup=100", ", local_warmup=100"),
        (5, "local_warmup=300", ", local_warmup=300"),
        (5, "lr_scale=1.4, local_warmup=100", ", lr_scale=1.4, local_warmup=100"),
        (5, "lr_scale=1.4, beta=0.8", TUNED),
        (5, "lr_scale=1.4, beta=0.7, local_warmup=100", LIFTED),
        (16, "lr_scale=0.5", ", lr_scale=0.5"),
        (16, "lr_scale=0.25", ", lr_scale=0.25"),
        (16, "alpha=4, beta=0.5", ", alpha=4.0, beta=0.5"),
        (16, "alpha=4, beta=0.1", ", alpha=4.0, beta=0.1"),
        (16, "alpha=0.25, beta=1", ", alpha=0.25, beta=1.0"),
        (16, "alpha=2, beta=0.8", ", alpha=2.0, beta=0.8"),
        (16, "local_warmup=100", ", local_warmup=100"),
        (16, "local_warmup=300", ", local_warmup=300"),
        (16, "lr_scale=1.4, local_warmup=300", ", lr_scale=1.4, local_warmup=300"),
    )
    settings = [
        ssd("secant", k, more=more, name=f"secant k={k}, {about}") for k, about, more in choices
    ]
    longer = ssd("secant", 16, warmup=200, name="secant k=16, warmup=200")
    plain = [ssd(local, k) for k in (5, 16) for local in ("mirror", "glu", "secant")]
    return [ssgd(), *plain, *settings, longer]


def with_adam() -> list[Setting]:
    """Returns Adam on the shards."""
    adam = {"optimizer": "adam", "lr": LR_ADAM}
    settings = [ssgd(name="adam ssgd", **adam)]
    for local, k in (
        ("mirror", 5),
        ("mirror", 16),
        ("mirror", 32),
        ("mirror kept", 5),
        ("mirror kept", 16),
        ("secant", 5),
        ("sgd", 5),
    ):
        settings.append(ssd(local, k, name=f"adam {local} k={k}", **adam))
    return settings


def gap() -> list[Setting]:
    """Returns attempts at the remaining distance to ssgd at k=32."""
    return [
        ssgd(),
        ssd("mirror", 32),
        ssgd(name="ssgd, 2x steps", longer=2.0),
        ssd("mirror", 32, name="mirror k=32, 2x steps", longer=2.0),
        ssd("mirror", 32, warmup=200, name="mirror k=32, warmup=200"),
        ssd("mirror kept", 32, warmup=200, name="mirror kept k=32, warmup=200"),
        ssd("mirror", 32, name="mirror k=32, lr=0.025", lr=LR / 2),
        ssgd(name="ssgd, lr=0.025", lr=LR / 2),
    ]


def spread() -> list[Setting]:
    """Returns pulls spread over 1, 2 and k steps; a model of one slice has nothing to spread."""
    return [
        ssgd(),
        *(
            ssd(local, k, WARMUP_FULL, f", spread={p}", name=f"{local} k={k}, spread={p}")
            for local, k in (("mirror", 5), ("mirror", 16), ("secant", 5))
            for p in (1, 2, k)
        ),
    ]


def resnet() -> list[Setting]:
    """Returns what ResNet-20 is run with: few, because each takes long on a CPU."""
    pairs = (("mirror", 5), ("secant", 5), ("mirror", 16))
    return [ssgd(), *(ssd(local, k) for local, k in pairs)]


SWEEPS = {
    "quick": quick,
    "k": by_k,
    "full": full,
    "modes": modes,
    "secant": tuned_secant,
    "adam": with_adam,
    "gap": gap,
    "spread": spread,
    "resnet": resnet,
}
