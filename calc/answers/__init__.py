"""The answers that pages ask for, computed once and kept between builds."""
