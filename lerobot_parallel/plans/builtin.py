"""The plans of the host's policies, one entry a policy, keyed by the policy's type."""

from lerobot_parallel.plans.plan import WrapPlan

BUILTIN_PLANS: dict[str, WrapPlan] = {
    # Encoder layers serve the VAE encoder too. BasicBlock is the ResNet backbone, absent without images.
    "act": WrapPlan(units=("ACTEncoderLayer", "ACTDecoderLayer", "BasicBlock", "Bottleneck")),
    # The strided convolutions between the residual blocks stay in the root: they are small and called singly.
    "diffusion": WrapPlan(units=("DiffusionConditionalResidualBlock1d", "BasicBlock", "Bottleneck")),
    # `update` is not a forward method: it moves the target network elementwise on the shards, after the
    # optimizer, and would write into temporary gathered copies if it were one.
    "tdmpc": WrapPlan(units=("Sequential",)),
    # In its first phase the policy trains the VQ-VAE through plain methods of the action head: no unit runs,
    # everything happens in the root.
    "vqbet": WrapPlan(units=("Block", "BasicBlock", "Bottleneck")),
}
