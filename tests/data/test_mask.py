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


def test_whole_numbers_empty_masks_and_wrong_shapes():
    assert float(masked_mean(np.array([1, 2, 4]), np.array([1, 0, 1]))) == 2.5
    assert float(masked_mean(jnp.ones(3), jnp.zeros(3, bool))) == 0.0
    assert masked_mean(jnp.ones(3, jnp.bfloat16), jnp.ones(3, bool)).dtype == jnp.bfloat16
    with pytest.raises(FeedError, match="the mask does not belong"):
        masked_mean(jnp.ones((4, 2)), jnp.ones(3, bool))
