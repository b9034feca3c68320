import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardax.data.mask import masked_mean
from shardax.errors import FeedError


def test_rows_that_do_not_count_reach_neither_value_nor_gradient():
    values, mask = jnp.array([[1.0, 2.0], [3.0, 6.0], [jnp.nan, jnp.inf]]), jnp.array([True, True, False])
    assert float(masked_mean(values, mask)) == 3.0
    assert masked_mean(values, mask, axis=0).tolist() == [2.0, 4.0]
    gradient = jax.jit(jax.grad(lambda v: masked_mean(v, mask)))(values)
    assert np.array_equal(gradient, [[0.25, 0.25], [0.25, 0.25], [0, 0]])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_short_floats_are_added_up_in_float32(dtype):
    """As `jnp.mean` does: 2,000 times 100 is more than float16 holds, 1,001 more than bfloat16 can count to."""
    for values in (jnp.full(2000, 100, dtype), jnp.ones(1001, dtype)):
        mean = masked_mean(values, jnp.ones(len(values), bool))
        assert mean.dtype == dtype and float(mean) == float(values[0])


def test_whole_numbers_empty_masks_and_wrong_shapes():
    assert float(masked_mean(np.array([1, 2, 4]), np.array([1, 0, 1]))) == 2.5
    assert float(masked_mean(jnp.ones(3), jnp.zeros(3, bool))) == 0.0
    assert masked_mean(jnp.ones(3, jnp.bfloat16), jnp.ones(3, bool)).dtype == jnp.bfloat16
    with pytest.raises(FeedError, match="the mask does not belong"):
        masked_mean(jnp.ones((4, 2)), jnp.ones(3, bool))
