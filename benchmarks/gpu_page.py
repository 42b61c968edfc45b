"""x"""
def section_table(section, found):
    return ""
