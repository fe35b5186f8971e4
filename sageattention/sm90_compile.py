"""For SGLang, which takes SageAttention on Hopper only where a name of this module can be imported.

In SageAttention the name says that `torch.compile`'s stand-in for the Hopper kernel does not replace the kernel. Nor does it
here, where the operators' stand-ins are those of `_ops.py`. There is nothing else in this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn


def qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf_fake_impl(*arguments: object, **options: object) -> NoReturn:
    """Stand-in for a kernel of SageAttention's that this package does not have: a name to import, not to call.

    Raises:
        NotImplementedError: always.
    """
    del arguments, options
    raise NotImplementedError(
        "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf: this package has no such kernel; call sageattention.sageattn, "
        "which compiles with torch.compile"
    )
