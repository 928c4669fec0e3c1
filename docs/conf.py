"""How `make docs` builds the site: Sphinx reads the Markdown that GitHub shows, and the docstrings."""

from importlib.metadata import version as version_of

project = "elastic-ps"
release = version = version_of("elastic-ps")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
exclude_patterns = ["news"]
html_theme = "furo"
html_title = f"elastic-ps {release}"

myst_heading_anchors = 4  # the anchors that GitHub gives to headings
myst_fence_as_directive = ["mermaid"]

# Docstrings write `code` as Markdown does, and name types of libraries that are not part of this site.
default_role = "code"
# Not only in the description: that would list the types of a constructor that is not shown.
autodoc_typehints = "both"
autodoc_typehints_description_target = "documented"
python_maximum_signature_line_length = 100
autodoc_member_order = "bysource"
nitpick_ignore_regex = [("py:.*", ".*")]
