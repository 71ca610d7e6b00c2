//! Guards and helpers of the privileged tests.
