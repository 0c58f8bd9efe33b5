"""The newer methods beyond the golden files: chance level, refusals, and slow references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.networks import CLASSES, ConvNet, batches, convnet, make, run, same, vmamba
from trust_tta.errors import ConfigError, ShapeError
from trust_tta.methods import gather_fisher, gather_source_statistics
from trust_tta.methods.augmentations import random_augmentation
from trust_tta.methods.deyo import shuffle_patches
from trust_tta.methods.losses import entropy
from trust_tta.methods.registry import create_method
from trust_tta.methods.rotta import BalancedMemory, MemoryItem
from trust_tta.preprocessing import Preprocessing, network_input


def test_eata_without_clean_images_names_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"^eata needs .*gather_fisher\(model, clean_batches\), or use 'eta'"):
        create_method("eata", convnet())
    with pytest.raises(ConfigError, match="method 'eata': fisher: .*gather_fisher|fisher.*gather_fisher"):
        create_method("eata", convnet(), fisher={"a": 1})
    with pytest.raises(ConfigError, match="no clean batches"):
        gather_fisher(convnet(), [])


def test_fisher_weights_of_other_parameters_are_refused() -> None:
    fisher = gather_fisher(vmamba(), batches(1), parameters="bn")
    with pytest.raises(ConfigError, match="other parameters; gather them on this network with parameters='ss2d'"):
        create_method("eata", vmamba(), parameters="ss2d", fisher=fisher)


def test_clean_images_that_are_not_finite_are_refused() -> None:
    (images,) = batches(1)
    images[0, 0, 0, 0] = torch.nan
    for gather in (gather_fisher, gather_source_statistics):
        with pytest.raises(ShapeError, match="the images hold values that are not finite"):
            gather(vmamba(), [images])


def test_clean_pixels_are_preprocessed_before_the_statistics_see_them() -> None:
    model: Any = vmamba()
    model.preprocessing = Preprocessing(size=16, resize=None, crop=False)
    pixels = [torch.randint(low, low + 40, (8, 16, 16, 3), dtype=torch.uint8) for low in (0, 100, 200)]
    floats = [network_input(model, each) for each in pixels]
    one, other = (gather_source_statistics(model, each, statistics="stream") for each in (pixels, floats))
    assert torch.equal(one.mean, other.mean)


def test_fisher_weights_leave_the_network_alone() -> None:
    model = vmamba().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fisher = gather_fisher(model, batches(2), statistics="stream")
    assert all((value >= 0).all() and value.isfinite().all() for value in fisher.values.values())
    assert same(dict(model.state_dict()), before)
    assert model.training


def test_an_anchor_of_no_weight_is_eta() -> None:
    eata = make("eata", vmamba(), fisher_alpha=0.0)
    eta = make("eta", vmamba(), margin=1.01, d_margin=2.0)
    torch.testing.assert_close(run(eata, batches(3)), run(eta, batches(3)))


def test_a_heavy_anchor_holds_the_weights() -> None:
    loose, held = (make("eata", vmamba(), fisher_alpha=alpha, optimizer="sgd", lr=1e-3) for alpha in (0.0, 30.0))
    moved = []
    for method in (loose, held):
        run(method, batches(4))
        moved.append(
            sum(float((p.detach() - method.weights.source[n]).square().sum()) for n, p in method.adapted.items())
        )
    assert moved[1] < moved[0]


def test_rdumb_is_eta_from_the_source_at_every_period() -> None:
    stream, options = batches(5), {"margin": 1.01, "d_margin": 2.0}
    rdumb, eta = make("rdumb", vmamba(), reset_every=2, **options), make("eta", vmamba(), **options)
    for i, images in enumerate(stream):
        if i % 2 == 0:
            eta.reset()
        assert torch.equal(rdumb(images), eta(images))
    assert rdumb.counters.recoveries == 2


@pytest.mark.parametrize("soft", [False, True])
def test_views_stay_within_the_range_of_pixels_and_follow_their_seed(soft: bool) -> None:
    prepare, model = Preprocessing(size=16, resize=None), nn.Identity()
    model.preprocessing = prepare  # type: ignore[assignment]
    images = prepare.normalize(torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8))
    black, white = (prepare.normalize(torch.full((1, 1, 1, 3), v, dtype=torch.uint8)) for v in (0, 255))
    views = [random_augmentation(images, model, seed=seed, soft=soft) for seed in (0, 0, 1)]
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])
    for view in views:
        assert view.shape == images.shape
        assert bool(((view >= black - 1e-5) & (view <= white + 1e-5)).all())
    before = torch.random.get_rng_state()
    random_augmentation(images, model, seed=3, soft=soft)
    assert torch.equal(torch.random.get_rng_state(), before)  # the caller's random numbers are left alone


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 5, 9, 7), (3, 3, 2, 2)])
def test_views_of_any_channels_and_size(shape: tuple[int, ...]) -> None:
    images = torch.randn(shape)
    for seed in range(5):
        assert random_augmentation(images, nn.Identity(), seed=seed, soft=True).isfinite().all()
    assert random_augmentation(torch.zeros(shape), nn.Identity(), seed=0, soft=False).isfinite().all()


def test_shuffled_patches_are_the_same_patches() -> None:
    images = torch.arange(2 * 3 * 64.0).view(2, 3, 8, 8)
    order = torch.stack([torch.randperm(16), torch.arange(16)])
    shuffled = shuffle_patches(images, order, 4)
    assert torch.equal(shuffled[1], images[1])
    assert torch.equal(shuffled[0].flatten().sort().values, images[0].flatten().sort().values)
    first = divmod(int(order[0, 0]), 4)
    assert torch.equal(shuffled[0, :, :2, :2], images[0, :, 2 * first[0] : 2 * first[0] + 2, 2 * first[1] :][:, :, :2])
    assert shuffle_patches(torch.randn(2, 3, 9, 3), order, 4).shape == (2, 3, 9, 3)  # scaled there and back


@pytest.mark.filterwarnings("ignore::trust_tta.errors.TrustWarning")
def test_deyo_and_roid_take_a_single_image() -> None:
    for name in ("roid", "cmf", "deyo"):
        method = make(name, vmamba())
        outputs = run(method, batches(3, images=1))
        assert method.counters.updates == 3
        assert all(o.isfinite().all() for o in outputs)


def test_t3a_against_a_slow_reference() -> None:
    model, network = convnet(), convnet().eval()
    rows = network.head.weight.detach()
    supports: list[tuple[Tensor, int, float]] = []

    def offer(features: Tensor) -> None:
        logits = network.head(features)
        for f, z in zip(features, logits, strict=True):
            supports.append((f, int(z.argmax()), float(entropy(z[None]))))

    with torch.no_grad():
        method = make("t3a", model, supports=3)
        offer(rows)
        for images in batches(3):
            features = network.forward_features(images)
            offer(features)
            prototypes = torch.zeros(CLASSES, rows.shape[1])
            kept = []
            for c in range(CLASSES):
                chosen = sorted((s for s in supports if s[1] == c), key=lambda s: s[2])[:3]
                kept += chosen
                prototypes[c] = sum((F.normalize(f, dim=0) for f, _, _ in chosen), torch.zeros(rows.shape[1]))
            supports = kept
            torch.testing.assert_close(method(images), features @ F.normalize(prototypes, dim=1).T)


def test_neo_centers_the_features() -> None:
    model = convnet()
    method = make("neo", model)
    stream = batches(3)
    run(method, stream)
    features = torch.cat([model.eval().forward_features(images) for images in stream])
    torch.testing.assert_close(method.mean_features, features.mean(0).detach())


def test_the_memory_is_balanced_and_never_too_large() -> None:
    generator = torch.Generator().manual_seed(0)
    memory = BalancedMemory([], 10, 4, 1.0, 1.0)
    for i in range(300):
        label = int(torch.randint(0, 4 if i > 100 else 1, (), generator=generator))
        memory.offer(MemoryItem(i, label, float(torch.rand((), generator=generator))))
        counts = [sum(item.label == c for item in memory.items) for c in range(4)]
        assert len(memory.items) <= 10
        assert max(counts) <= 3  # ten over four, rounded up
        assert [item.label for item in memory.items] == sorted(item.label for item in memory.items)
    assert min(counts) >= 2


def test_rotta_refuses_images_of_another_shape_until_a_reset() -> None:
    method = make("rotta", vmamba())
    method(batches(1)[0])
    with pytest.raises(ShapeError, match=r"remembers images of shape \(3, 16, 16\) .*reset\(\) before"):
        method(batches(1, size=24)[0])
    method.reset()
    assert method(batches(1, size=24)[0]).shape == (9, CLASSES)


def test_what_cotta_detaches_is_the_teacher_that_predicts() -> None:
    model = convnet()
    method = make("cotta", model)
    outputs = run(method, batches(3))[-1]
    assert not torch.equal(method.student, method.weights.snapshot())
    still: Any = make("bn", method.detach())
    torch.testing.assert_close(still(batches(3)[-1]), outputs)


@pytest.mark.parametrize("name", ["bn_alpha", "bn_ema"])
def test_moving_statistics_between_the_source_and_the_batch(name: str) -> None:
    (images,) = batches(1)
    source, batch = make("source", convnet())(images), make("bn", convnet())(images)
    option = "alpha" if name == "bn_alpha" else "momentum"
    torch.testing.assert_close(make(name, convnet(), **{option: 0.0})(images), source)
    if name == "bn_alpha":  # the variance is the unbiased one
        torch.testing.assert_close(make(name, convnet(), alpha=1.0)(images), batch, rtol=0.1, atol=0.1)
    for kind, expected in (("source", source), ("batch", batch)):
        if (name, kind) != ("bn_alpha", "batch"):
            torch.testing.assert_close(make(name, convnet(), statistics=kind)(images), expected)


class Dense(nn.Module):
    """A label for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3), nn.Conv2d(3, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(images))
        return logits


@pytest.mark.parametrize("name", ["eata", "rdumb", "bn_alpha", "bn_ema"])
def test_dense_predictions_come_for_free(name: str) -> None:
    assert run(make(name, Dense()), batches(2))[-1].shape == (9, CLASSES, 16, 16)


@pytest.mark.parametrize("name", ["roid", "cmf", "cotta", "rotta", "deyo"])
def test_dense_predictions_are_refused_in_one_line(name: str) -> None:
    method = make(name, Dense(), **({"skip_last": False} if name == "deyo" else {}))
    before = method.state_dict()
    with pytest.raises(ShapeError, match=f"'{name}' takes one prediction for each image .*for dense predictions use"):
        method(batches(1)[0])
    assert same(method.state_dict(), before)


def test_features_that_are_maps_are_refused() -> None:
    class Maps(ConvNet):
        def forward_features(self, images: Tensor) -> Tensor:
            features: Tensor = self.body(images)
            return features

    for name in ("neo", "t3a"):
        with pytest.raises(ShapeError, match=r"the features have shape .* give pooled features \(n, d\)"):
            make(name, Maps())(batches(1)[0])
