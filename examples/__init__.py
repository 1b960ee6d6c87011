"""What is built with the library, in a checkout: it is no part of the package."""
