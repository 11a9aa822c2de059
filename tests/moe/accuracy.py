"""How far an output is from the truth: relative RMS of the whole and of the worst token."""

from torch import Tensor


def rms(found_TD: Tensor, truth_TD: Tensor) -> tuple[float, float]:
    """Relative RMS error over everything, and of the token where it is worst.

    A token is measured against the typical token (the RMS over all), so that one that is nearly zero by
    cancellation does not decide; NaN anywhere makes both infinite.
    """
    truth_TD = truth_TD.double()
    error_TD = found_TD.double() - truth_TD
    if not error_TD.numel():
        return 0.0, 0.0
    if not error_TD.isfinite().all():
        return float("inf"), float("inf")
    scale = truth_TD.square().mean().sqrt().clamp_min(1e-30)
    return (
        float(error_TD.square().mean().sqrt() / scale),
        float(error_TD.square().mean(-1).sqrt().max() / scale),
    )
