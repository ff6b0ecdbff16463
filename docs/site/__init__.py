"""Makes the sources of the site: the pages of docs/, and a reference made of the code."""
